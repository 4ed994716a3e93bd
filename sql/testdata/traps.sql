-- Plants in schema $SCHEMA, as the role that runs it, what a call could be taken for: for every function of the names
-- in $FUNCTIONS the same with each argument of another type; for every operator in $OPERATORS one for each pair of
-- types; types with the names of Postgres' own; and implicit casts. Nobody may call them, which Postgres notices
-- before it runs a statement.
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
CREATE TYPE $SCHEMA.bait AS ENUM ('bait');
CREATE CAST (text AS $SCHEMA.bait) WITH INOUT AS IMPLICIT;
CREATE CAST (bigint AS $SCHEMA.bait) WITH INOUT AS IMPLICIT;
CREATE CAST ($SCHEMA.bait AS bigint) WITH INOUT AS IMPLICIT;
CREATE TYPE $SCHEMA.text AS ENUM ('text');
CREATE TYPE $SCHEMA.jsonb AS ENUM ('jsonb');
CREATE TYPE $SCHEMA.array_agg AS ENUM ('array_agg');
CREATE TYPE $SCHEMA.regclass AS ENUM ('regclass');
DO $$
DECLARE
    types text[] := '{smallint,integer,bigint,numeric,real,double precision,text,varchar,bpchar,name,uuid,bytea,boolean,
        jsonb,json,timestamptz,timestamp,time,date,interval,pg_lsn,oid,regclass,xid,xid8,pg_snapshot,"\"char\"",bit,
        smallint[],integer[],bigint[],
        text[],uuid[],name[],bytea[],timestamptz[],$SCHEMA.bait}';
    a text; b text; op text; f record; args text[];
BEGIN
    FOREACH a IN ARRAY types LOOP
        EXECUTE format('CREATE FUNCTION $SCHEMA.trap(%s) RETURNS boolean LANGUAGE sql AS ''SELECT true''', a);
        EXECUTE format('CREATE OPERATOR $SCHEMA.- (RIGHTARG = %s, FUNCTION = $SCHEMA.trap)', a);
        FOREACH b IN ARRAY types LOOP
            EXECUTE format('CREATE FUNCTION $SCHEMA.trap(%s, %s) RETURNS boolean LANGUAGE sql AS ''SELECT true''', a,
                b);
            FOREACH op IN ARRAY '{$OPERATORS}'::text[] LOOP
                EXECUTE format('CREATE OPERATOR $SCHEMA.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = $SCHEMA.trap)',
                    op, a, b);
            END LOOP;
        END LOOP;
    END LOOP;
    FOR f IN SELECT proname, ARRAY(SELECT format_type(o, NULL) FROM unnest(proargtypes) WITH ORDINALITY AS x(o, n)
        ORDER BY n) AS args
             FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY ('{$FUNCTIONS}'::text[])
               AND NOT 'internal'::regtype = ANY (proargtypes::regtype[]) LOOP
        EXECUTE format('CREATE OR REPLACE FUNCTION $SCHEMA.%I(boolean DEFAULT true) RETURNS boolean '
            'LANGUAGE sql AS ''SELECT true''', f.proname);
        FOR i IN 1 .. cardinality(f.args) LOOP
            FOREACH a IN ARRAY types LOOP
                args := ARRAY(SELECT CASE WHEN n = i OR t ~ '^"?any' THEN CASE WHEN t LIKE '%array'
                    AND n <> i THEN a || '[]' ELSE a END ELSE t END
                              FROM unnest(f.args) WITH ORDINALITY AS x(t, n) ORDER BY n);
                CONTINUE WHEN 'record' = ANY (args);
                IF to_regprocedure(format('$SCHEMA.%I(%s)', f.proname, array_to_string(args, ','))) IS NULL THEN
                    EXECUTE format('CREATE FUNCTION $SCHEMA.%I(%s) RETURNS boolean LANGUAGE sql AS ''SELECT true''',
                        f.proname, array_to_string(args, ','));
                END IF;
            END LOOP;
        END LOOP;
    END LOOP;
END $$;
