"""From Dynamo's graph to a forward and a backward graph whose inputs are known by name."""
