"""Pure data that crosses a process boundary. Imports only pydantic and light modules."""
