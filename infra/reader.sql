-- Creates the role that can only read the history: `rlhf sql` runs statements as this role, Grafana and other tools log
-- in as it. Run it as a superuser, in the database of the history, after `rlhf db upgrade`; it may be run
-- again. OWNER is the user of RLHF_DATABASE_URL, which owns the tables and should not be a superuser:
--
--     rlhf db reader | psql -d DATABASE                    prints this file, with the user of RLHF_DATABASE_URL as OWNER
--     psql -d DATABASE -v owner=OWNER -f infra/reader.sql  the same from a checkout
--     psql -d DATABASE -c '\password rlhf_reader'          for Grafana: a role without a password cannot log in
--
-- The schema is the one that contains the tables. If several do, -v schema=SCHEMA names the one of this history.

\set ON_ERROR_STOP on

SELECT 'CREATE ROLE rlhf_reader LOGIN' WHERE NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'rlhf_reader') \gexec

-- A query that a dashboard repeats every minute must not run for an hour.
ALTER ROLE rlhf_reader SET default_transaction_read_only = on;
ALTER ROLE rlhf_reader SET statement_timeout = '30s';

-- The tables are in the first schema of the owner's search_path, which need not be public.
\if :{?schema}
\else
SELECT coalesce((
    SELECT nspname
      FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
     WHERE relname = 'alembic_version' AND relkind = 'r'
       AND EXISTS (SELECT FROM pg_class AS runs WHERE runs.relnamespace = pg_namespace.oid AND runs.relname = 'runs')
     ORDER BY pg_get_userbyid(relowner) = :'owner' DESC, nspname = 'public' DESC
     LIMIT 1), 'public') AS schema \gset
\endif

GRANT USAGE ON SCHEMA :"schema" TO rlhf_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA :"schema" TO rlhf_reader;
-- Grafana logs in as this role, whose own search_path does not contain another schema.
ALTER ROLE rlhf_reader IN DATABASE :"DBNAME" SET search_path = :"schema";
-- Makes tables of later migrations readable too.
ALTER DEFAULT PRIVILEGES FOR ROLE :"owner" IN SCHEMA :"schema" GRANT SELECT ON TABLES TO rlhf_reader;
GRANT rlhf_reader TO :"owner";

-- With this function a query could regain the owner's rights. The owner's own programs (pg_dump) need it.
REVOKE EXECUTE ON FUNCTION pg_catalog.set_config(text, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION pg_catalog.set_config(text, text, boolean) TO :"owner";
