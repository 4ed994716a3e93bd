//go:build !failpoints

package failpoint

import "github.com/jackc/pgx/v5"

// Before is called before a message is sent to a server, After when the server has answered.
func Before(string, ...any) {}

// After is Before's counterpart.
func After(string, ...any) {}

// Statements makes the connections of cfg call Before and After for each statement.
func Statements(*pgx.ConnConfig) {}
