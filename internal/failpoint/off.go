//go:build !failpoints

package failpoint

import "github.com/jackc/pgx/v5"

// Before is called before what is sent to a server, After when the server has answered.
func Before(string, ...any) {}

// After is Before's counterpart.
func After(string, ...any) {}

// Statements has Before and After called for each statement of the connections of cfg.
func Statements(*pgx.ConnConfig) {}
