package ops

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Beyond is beyond.
var Beyond = beyond

// Encryption is what the doctor would find about a connection, did it go beyond this machine.
func Encryption(ctx context.Context, conn *pgx.Conn) []Finding {
	d := &doctor{}
	d.encryption(ctx, conn)
	return d.findings
}
