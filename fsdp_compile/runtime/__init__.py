"""What happens in a step: units, parameter groups, gradients."""
