"""What must be true of every transformed graph. Shares no code with the passes that it judges."""
