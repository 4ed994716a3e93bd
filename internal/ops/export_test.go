package ops

import (
	"context"

	"github.com/jackc/pgx/v5"
)

var Beyond = beyond

// Encryption returns the doctor's findings about a connection as if it left this machine.
func Encryption(ctx context.Context, conn *pgx.Conn) []Finding {
	d := &doctor{}
	d.encryption(ctx, conn)
	return d.findings
}
