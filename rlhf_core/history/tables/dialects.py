"""SQL that the two databases write differently."""

from typing import TypeAlias


class Sqlite:
    """SQL of SQLite."""

    finding = "json_extract(b.data, '$.finding')"
    figures, figure = "json_each(t.figures)", "f.value"
    is_external = "json_extract(n.spec, '$.trainer.kind') = 'command'"

    @staticmethod
    def seconds(start: str, end: str) -> str:
        return f"((julianday({end}) - julianday({start})) * 86400.0)"

    @staticmethod
    def earlier(time: str, seconds: str) -> str:
        # In the form in which times are stored, so that they can be compared as text.
        modifier = f"printf('-%.6f seconds', COALESCE({seconds}, 0))"
        return f"strftime('%Y-%m-%d %H:%M:%f000', {time}, {modifier})"

    @staticmethod
    def computed(columns: str, source: str, name: str, moments: str) -> str:
        # There is no LATERAL; SQLite repeats some of the moments.
        return f"SELECT {columns} FROM (SELECT {name}.*, {moments} FROM {source}) {name}"


class Postgresql:
    """SQL of PostgreSQL."""

    finding = "b.data ->> 'finding'"
    figures, figure = "jsonb_each(t.figures)", "CAST(f.value AS double precision)"
    is_external = "n.spec -> 'trainer' ->> 'kind' = 'command'"

    @staticmethod
    def seconds(start: str, end: str) -> str:
        return f"CAST(EXTRACT(EPOCH FROM ({end} - {start})) AS double precision)"

    @staticmethod
    def earlier(time: str, seconds: str) -> str:
        return f"({time} - COALESCE({seconds}, 0) * INTERVAL '1 second')"

    @staticmethod
    def computed(columns: str, source: str, name: str, moments: str) -> str:
        # Without OFFSET, it would compute and plan a moment wherever it occurs. A subquery in the outermost FROM that
        # it cannot merge would keep it from restricting the view to one run.
        return f"SELECT {columns} FROM {source} CROSS JOIN LATERAL (SELECT {moments} OFFSET 0) moments"


Dialect: TypeAlias = type[Sqlite] | type[Postgresql]
"""SQL that differs. ``is_external``: condition for runs ``n`` of trainers that report their steps as they like; native
trainers report each step. ``seconds``: from one time to another. ``earlier``: a time some seconds before another one.
``computed``: columns of a source with this alias, and of moments that are computed once per row."""

DIALECTS: dict[str, Dialect] = {"sqlite": Sqlite, "postgresql": Postgresql}
