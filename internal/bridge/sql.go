package bridge

import (
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// jsonTypes are the types of payloads and headers, as queries/table.sql names them.
var jsonTypes = []string{
	"jsonb", "json", "text", "bpchar", "jsonb domain", "json domain", "text domain", "bpchar domain",
}

// event makes the expressions of an event's columns.
type event struct {
	*table
	Config

	// row is how a statement refers to the source row, helpers the quoted schema of posthaste's functions.
	row, helpers string
}

func (e event) column(name string) string { return e.row + "." + pgx.Identifier{name}.Sanitize() }

// text is a column as text. It does not call a cast: see the package comment.
func (e event) text(name string) string {
	text := "pg_catalog.concat(" + e.column(name) + ")"
	if typ, _ := e.typeOf(name); strings.HasPrefix(typ, "bpchar") {
		text = "pg_catalog.rtrim(" + text + ", ' ')"
	}
	return text
}

// where is the place and the row of an error, as arguments.
func (e event) where(name string) string {
	return literal("column "+name+" of "+e.name()) + ", " + e.text(e.ID)
}

// refuse raises an error that says which value a column must have.
func (e event) refuse(name, want string) string {
	return fmt.Sprintf("%s.outbox_bridge_refuse(%s, %s)", e.helpers, literal(want), e.where(name))
}

// limited is a column as text, or the literal of its flag. A row that does not meet the condition is refused; the
// condition is a format with the text.
func (e event) limited(name, condition, want string) string {
	if value, ok := strings.CutPrefix(name, "="); ok {
		return literal(value)
	}
	return fmt.Sprintf("CASE WHEN %s IS NOT NULL AND %s THEN %s ELSE %s END", e.column(name),
		fmt.Sprintf(condition, e.text(name)), e.text(name), e.refuse(name, want))
}

// id is the event's id.
func (e event) id() string {
	column, condition := e.column(e.ID), "IS NOT NULL"
	id := fmt.Sprintf("%s.outbox_bridge_id(pg_catalog.concat(%s, %s))", e.helpers, literal(e.Table+":"), e.text(e.ID))
	switch typ, _ := e.typeOf(e.ID); typ {
	case "uuid":
		id, condition = column, "IS NOT NULL AND "+still(column, "uuid")
	case "uuid domain":
		id = e.text(e.ID) + "::uuid"
	}
	return fmt.Sprintf("CASE WHEN %s %s THEN %s ELSE %s::uuid END", column, condition, id,
		e.refuse(e.ID, "set, and have the type that it had"))
}

// still is a condition: a column that is used as it is has a type whose casts only a superuser can replace.
func still(column, typ string) string {
	return fmt.Sprintf("pg_catalog.pg_typeof(%s)::oid = 'pg_catalog.%s'::regtype::oid", column, typ)
}

// json is a column as jsonb.
func (e event) json(name string) string {
	column := e.column(name)
	if typ, _ := e.typeOf(name); typ == "jsonb" {
		return fmt.Sprintf("CASE WHEN %s IS NULL OR %s THEN %s ELSE %s::jsonb END", column, still(column, "jsonb"),
			column, e.refuse(name, "jsonb, as it was"))
	}
	return fmt.Sprintf("CASE WHEN %s IS NOT NULL THEN %s.outbox_bridge_json(%s, %s) END", column, e.helpers,
		e.text(name), e.where(name))
}

// expressions are the columns of an INSERT into outbox, in the order of columns.
func (e event) expressions() []string {
	list := []string{
		e.id(),
		// {1,64} in the expression would take Postgres 12 µs a row.
		e.limited(e.AggregateType, `pg_catalog.octet_length(%[1]s) <= 64 AND %[1]s COLLATE "C" ~ '^[A-Za-z0-9_.:-]+$'`,
			"1 to 64 of A-Z a-z 0-9 _ . : -"),
		e.limited(e.AggregateID, "pg_catalog.octet_length(%s) <= 1024", "set, and at most 1024 bytes"),
		e.limited(e.EventType, "pg_catalog.length(%s) <= 255", "set, and at most 255 characters"),
		// An event without a payload is one whose payload is the JSON value null.
		"coalesce(" + e.json(e.Payload) + ", 'null'::jsonb)",
	}
	if e.Headers != "" {
		list = append(list, e.json(e.Headers))
	}
	return list
}

func (e event) columns() string {
	if e.Headers != "" {
		return "id, aggregate_type, aggregate_id, event_type, payload, headers"
	}
	return "id, aggregate_type, aggregate_id, event_type, payload"
}

// insert copies rows; from is everything after the expressions.
func (e event) insert(from string) string {
	return fmt.Sprintf("INSERT INTO %s.outbox (%s)\nSELECT %s\n%s", e.helpers, e.columns(),
		strings.Join(e.expressions(), ",\n    "), from)
}

// unique is the condition that an id in outbox does not meet.
const unique = "unique: posthaste's bridge of the table finds an event with the id in outbox. Give the row another " +
	"id; posthaste replay --id=EVENT publishes an event again"

// taken raises the error for rows that were not copied, because outbox has their ids. It has the SQLSTATE of the
// constraint, on which an application may act. The query finds no row if the transaction has inserted the event itself.
func (e event) taken() string {
	return fmt.Sprintf(`RAISE unique_violation USING MESSAGE = %s,
    DETAIL = coalesce((SELECT pg_catalog.format('The id "%%s" is that of event %%s.', %s, o.id)
        FROM posthaste_new AS n JOIN %s.outbox o ON o.id = %s
        WHERE o.xid::xid8 <> pg_catalog.pg_current_xact_id() LIMIT 1),
        'This transaction inserts two rows with the id.')`,
		literal("column "+e.ID+" of "+e.name()+" must be "+unique), e.text(e.ID), e.helpers, e.id())
}

// body is the body of the trigger's function; sequence counts the rows.
func (e event) body(sequence string) string {
	count := "pg_catalog.nextval(" + literal(sequence) + "::regclass) > 0::bigint"
	if e.Kind == "r" {
		e.row = "n"
		return "\nDECLARE posthaste_copied bigint;\nBEGIN\n" +
			e.insert("FROM posthaste_new AS n WHERE "+count+" ON CONFLICT (id) DO NOTHING") +
			";\nGET DIAGNOSTICS posthaste_copied = ROW_COUNT;\n" +
			"IF posthaste_copied < (SELECT pg_catalog.count(*) FROM posthaste_new) THEN\n" + e.taken() +
			";\nEND IF;\nRETURN NULL;\nEND "
	}
	// An UPDATE that moves a row to another partition inserts it there.
	e.row = "NEW"
	x := e.expressions()
	return "\nBEGIN\n" + e.insert("WHERE "+count+" ON CONFLICT (id) DO NOTHING") + ";\n" +
		"IF NOT FOUND AND NOT EXISTS (SELECT FROM " + e.helpers + ".outbox o WHERE o.id = " + x[0] +
		"\n    AND o.aggregate_type = " + x[1] + " AND o.aggregate_id = " + x[2] +
		"\n    AND o.event_type::text = " + x[3] + " AND o.payload = " + x[4] + ") THEN\n    PERFORM " +
		e.refuse(e.ID, unique) +
		";\nEND IF;\nRETURN NULL;\nEND "
}

// waiting selects the pending rows without a copy. An error in the condition can be at its end, hence the new line.
func (e event) waiting() string {
	e.row = pgx.Identifier{e.ofTable}.Sanitize()
	return fmt.Sprintf("FROM %s WHERE (%s\n) AND NOT EXISTS (SELECT FROM %s.outbox posthaste_copy "+
		"WHERE posthaste_copy.id = %s)", e.quoted(), e.Pending, e.helpers, e.id())
}

// ofEvent selects the number and the id of the waiting rows of event $1, whether they have a copy or not.
func (e event) ofEvent() string {
	e.row = pgx.Identifier{e.ofTable}.Sanitize()
	return fmt.Sprintf("SELECT count(*), pg_catalog.min(%s) FROM %s WHERE (%s\n) AND %s = $1::uuid", e.text(e.ID),
		e.quoted(), e.Pending, e.id())
}

// copy copies the waiting rows in order.
func (e event) copy(sequence string) string {
	e.row = pgx.Identifier{e.ofTable}.Sanitize()
	return e.insert(e.waiting() + " AND pg_catalog.nextval(" + literal(sequence) + "::regclass) > 0::bigint\n" +
		"ORDER BY " +
		e.column(e.OrderBy) + ", " + e.row + ".ctid")
}

// statements create the bridge called name, and copy the waiting rows. The trigger's lock keeps writers out until the
// end of the transaction, so the copy sees every row for which the trigger did not fire.
func (e event) statements(name, comment string) []string {
	object := e.helpers + "." + name
	trigger := "CREATE TRIGGER posthaste_bridge AFTER INSERT ON " + e.quoted()
	if e.Kind == "r" {
		trigger += " REFERENCING NEW TABLE AS posthaste_new FOR EACH STATEMENT"
	} else {
		trigger += " FOR EACH ROW"
	}
	list := []string{
		"CREATE SEQUENCE " + object,
		"CREATE FUNCTION " + object + "() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER\n" +
			"SET search_path = pg_catalog, pg_temp AS $" + name + "$" + e.body(object) + "$" + name + "$",
		// Otherwise an owner of a table could attach it there, and write into outbox.
		"REVOKE EXECUTE ON FUNCTION " + object + " FROM PUBLIC",
		"COMMENT ON FUNCTION " + object + " IS " + literal(comment),
		trigger + " EXECUTE FUNCTION " + object + "()",
	}
	if e.Pending != "" {
		list = append(list, e.copy(object))
	}
	return list
}

// literal quotes a text for every setting of standard_conforming_strings.
func literal(s string) string {
	quoted := "'" + strings.ReplaceAll(s, "'", "''") + "'"
	if strings.Contains(s, `\`) {
		return " E" + strings.ReplaceAll(quoted, `\`, `\\`)
	}
	return quoted
}
