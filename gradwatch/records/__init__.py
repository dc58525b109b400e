"""Values passed from capture to the sinks: sites, snapshot, verdict, decision, record, finding; no torch."""
