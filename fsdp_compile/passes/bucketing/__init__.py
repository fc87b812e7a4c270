"""What the bucket pass is made of: messages, layouts, joins."""
