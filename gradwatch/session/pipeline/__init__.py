"""One step of one optimizer: measured, put off where nothing is urgent, judged, decided, published as a Record."""
