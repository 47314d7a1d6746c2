"""Programs of users, and environments of other libraries, that drive samples by calling the policy."""
