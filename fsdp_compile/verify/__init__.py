"""The rules that every transformed graph must keep. Shares no code with the passes that it checks."""
