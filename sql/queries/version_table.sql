-- Whether $1 is a table of a role whose rights this one has by itself. A superuser has every role's: for it, another
-- superuser's.
SELECT c.relkind = 'r' AND CASE WHEN me.rolsuper THEN owner.rolsuper
    ELSE pg_catalog.pg_has_role(owner.oid, 'USAGE') END, owner.rolname
FROM pg_class c JOIN pg_roles owner ON owner.oid = c.relowner JOIN pg_roles me ON me.rolname = current_user
WHERE c.oid = pg_catalog.to_regclass($1::text)::oid
