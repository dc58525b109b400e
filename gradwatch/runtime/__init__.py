"""What any part of gradwatch needs of the machine it runs on: files and numbers that others read."""
