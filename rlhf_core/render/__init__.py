"""The report of one run: a single HTML file that needs nothing but a browser."""
