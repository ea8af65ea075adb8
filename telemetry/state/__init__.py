"""What the tier holds, what this engine computed before, and whether the numbers add up."""
