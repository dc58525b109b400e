"""Every Record of many situations, written down by two checkouts and compared: a redesign changes none of them."""
