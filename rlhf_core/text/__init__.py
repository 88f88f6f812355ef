"""Text that people are shown: figures formatted, untrusted text escaped, secrets masked. Pure."""
