"""From Dynamo's graph to a forward and a backward graph whose inputs have records."""
