"""A transition of a rule as it is reported: its Events.

`transitions` makes the Events that are due, `events` their texts; `culprit` names the parameter at fault,
`incident_inhibition` finds the incident of another rule that a new one is part of.
"""
