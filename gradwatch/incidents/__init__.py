"""An incident as a whole: its cause explained, fixes suggested, its page and its bundle."""
