"""Messages to people, without a monitoring stack: an HTTP endpoint, Slack, e-mail."""
