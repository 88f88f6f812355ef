"""Text shown to people: formatting of figures, escaping of untrusted text, masking of secrets. Pure."""
