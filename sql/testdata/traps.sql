-- Plants in schema $SCHEMA, as the role that runs it, what a call could be taken for: for every function of the names
-- in $FUNCTIONS the same with each argument of another type; for every operator in $OPERATORS one for each pair of
-- types; types with the names of Postgres' own; and implicit casts. Nobody may call them, which Postgres notices
-- before it runs a statement. What Postgres refuses without a trap is left out, because no statement has it: pairs and
-- arguments that no implicit cast makes those of something in pg_catalog. A literal beside a value is taken for one of
-- its type, and a literal argument for text.
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
    a text; f record; args text[];
BEGIN
    CREATE TEMPORARY TABLE fits AS -- a value of the type as an argument of the other
        SELECT v AS value, t.oid AS arg FROM unnest(types) v, pg_type t
        WHERE v::regtype = t.oid OR t.typname ~ '^any' AND t.typname !~ '^any(compatible)?(array|enum|.*range)$'
            OR v LIKE '%[]' AND t.typname ~ '^(_|any(compatible)?array$)'
            OR EXISTS (SELECT FROM pg_cast WHERE castsource = v::regtype AND casttarget = t.oid AND castcontext = 'i');
    FOREACH a IN ARRAY types LOOP
        EXECUTE format('CREATE FUNCTION $SCHEMA.trap(%s) RETURNS boolean LANGUAGE sql AS ''SELECT true''', a);
        EXECUTE format('CREATE OPERATOR $SCHEMA.- (RIGHTARG = %s, FUNCTION = $SCHEMA.trap)', a);
    END LOOP;
    FOR f IN SELECT l, r, array_agg(op) AS ops
             FROM unnest(types) l, unnest(types) r, unnest('{$OPERATORS}'::text[]) AS x(op)
             WHERE l = r OR '$SCHEMA.bait' IN (l, r) OR EXISTS (SELECT FROM pg_operator o
                 JOIN fits lf ON lf.arg = o.oprleft JOIN fits rf ON rf.arg = o.oprright
                 WHERE o.oprname = x.op AND lf.value = l AND rf.value = r)
             GROUP BY l, r LOOP
        EXECUTE format('CREATE FUNCTION $SCHEMA.trap(%s, %s) RETURNS boolean LANGUAGE sql AS ''SELECT true''', f.l,
            f.r);
        FOREACH a IN ARRAY f.ops LOOP
            EXECUTE format('CREATE OPERATOR $SCHEMA.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = $SCHEMA.trap)', a, f.l,
                f.r);
        END LOOP;
    END LOOP;
    FOR f IN SELECT proname, proargtypes, ARRAY(SELECT format_type(o, NULL)
        FROM unnest(proargtypes) WITH ORDINALITY AS x(o, n) ORDER BY n) AS args
             FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY ('{$FUNCTIONS}'::text[])
               AND NOT 'internal'::regtype = ANY (proargtypes::regtype[]) LOOP
        EXECUTE format('CREATE OR REPLACE FUNCTION $SCHEMA.%I(boolean DEFAULT true) RETURNS boolean '
            'LANGUAGE sql AS ''SELECT true''', f.proname);
        FOR i IN 1 .. cardinality(f.args) LOOP
            FOR a IN SELECT value FROM fits WHERE arg = f.proargtypes[i - 1] UNION SELECT 'text' LOOP
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
