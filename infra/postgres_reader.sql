-- Makes the role that `rlhf sql` asks its questions as. Run once, as a superuser, in the database of the history, after
-- `rlhf db upgrade`; OWNER is the user of RLHF_DATABASE_URL, who owns the tables and should be no superuser himself:
--
--     psql -d DATABASE -v owner=OWNER -f infra/postgres_reader.sql

\set ON_ERROR_STOP on

SELECT 'CREATE ROLE rlhf_reader NOLOGIN' WHERE NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'rlhf_reader') \gexec

GRANT USAGE ON SCHEMA public TO rlhf_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO rlhf_reader;
ALTER DEFAULT PRIVILEGES FOR ROLE :"owner" IN SCHEMA public GRANT SELECT ON TABLES TO rlhf_reader;
GRANT rlhf_reader TO :"owner";

-- With this function a question could give itself the owner's rights back. The owner's own programs (pg_dump) need it.
REVOKE EXECUTE ON FUNCTION pg_catalog.set_config(text, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION pg_catalog.set_config(text, text, boolean) TO :"owner";
