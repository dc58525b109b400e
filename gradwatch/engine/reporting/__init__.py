"""A transition of a rule as it is reported: its Events.

`culprit` names the parameter that is at fault, `incident_inhibition` finds the incident of another rule that it belongs
to, `transitions` the events that are due, `events` their texts.
"""
