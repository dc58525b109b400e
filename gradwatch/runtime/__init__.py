"""Services used by every part of gradwatch: files and numbers that others read."""
