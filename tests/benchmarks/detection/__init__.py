"""How well rules and other tools' checks detect what goes wrong in a training: recall, delay, culprit, false alarms."""
