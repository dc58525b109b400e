"""The top of the flow: attach, watch, the session, the step boundary, one step measured, judged, published."""
