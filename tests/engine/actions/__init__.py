"""Rules judged: events, decisions, memory."""
