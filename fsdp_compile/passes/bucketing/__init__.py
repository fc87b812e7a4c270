"""Parts of the bucket pass: messages, layouts, joins."""
