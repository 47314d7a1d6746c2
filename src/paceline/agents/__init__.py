"""Programs of users that drive samples: functions and processes that call the policy through the OpenAI API."""
