"""Pure data that crosses a process boundary. Imports pydantic and nothing else of weight."""
