package sql

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// Publication returns the name of the publication of the outbox in schema: posthaste for public, else
// posthaste_<schema>. Postgres cuts names after 63 bytes.
func Publication(schema string) string {
	if schema == "public" {
		return "posthaste"
	}
	name := "posthaste_" + schema
	return name[:min(len(name), 63)]
}

// CheckRelayName returns an *outbox.TakenNameError if an outbox in another schema of the database has a relay called
// name. It reads only schemas whose outbox belongs to a role whose rights this one has.
func CheckRelayName(ctx context.Context, db DB, name string) error {
	others, err := collect(ctx, db, "list the schemas with an outbox", pgx.RowTo[string], "relay_schemas")
	if err != nil {
		return err
	}
	for _, other := range others {
		var taken bool
		err := db.QueryRow(ctx, "SELECT EXISTS (SELECT FROM "+pgx.Identifier{other, "relay_state"}.Sanitize()+
			" WHERE name = $1)", name).Scan(&taken)
		if err != nil {
			return fmt.Errorf("read the name of the relay of schema %q: %w", other, err)
		}
		if taken {
			return &outbox.TakenNameError{Name: name, Schema: other}
		}
	}
	return nil
}

// checkPublication returns an error if the publication of an outbox that does not exist yet is there.
func checkPublication(ctx context.Context, db DB, schema string) error {
	name := Publication(schema)
	var owner, tables string
	err := db.QueryRow(ctx, query("publication_taken"), name).Scan(&owner, &tables)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for publication %q: %w", name, err)
	}
	return fmt.Errorf("publication %q exists already, owned by role %q, with %s: DROP PUBLICATION %s, if no program "+
		"uses it, or use another --schema", name, owner, tables, pgx.Identifier{name}.Sanitize())
}

// createPublication creates the publication of an outbox, before any slot: a slot that is older than its publication
// cannot be decoded.
func createPublication(ctx context.Context, db DB, schema string) error {
	name := pgx.Identifier{Publication(schema)}.Sanitize()
	_, err := db.Exec(ctx, "CREATE PUBLICATION "+name+" FOR TABLE outbox WITH (publish = 'insert')")
	return err
}
