"""What is asked: prompts, and later environments and rewards."""
