package sql

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/internal/socket"
	"posthaste/outbox"
)

// setURL is the remedy of most failures to connect.
const setURL = "set POSTHASTE_POSTGRES_URL"

// Explain splits an error of Postgres into the problem, with what it concerns, and the remedy. Both are "" for other
// errors, and the remedy is "" if it is unknown or part of the problem.
func Explain(err error) (problem, remedy string) {
	refused, answered := errors.AsType[*pgconn.PgError](err)
	if failed, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return unconnected(failed, refused)
	}
	if !answered {
		return "", ""
	}
	if statementPooled(err) {
		return (&PoolingError{StatementPooling}).Error(), ""
	}
	problem = strings.Replace(err.Error(), refused.Error(), refused.Message, 1)
	if errors.As(err, new(*outbox.SlotError)) {
		return problem, ""
	}
	return problem, remedies[refused.Code]
}

// StandbyRemedy is the remedy of commits that wait for a synchronous standby.
const StandbyRemedy = "bring it back, or change synchronous_standby_names"

// remedies are those of refused statements, by SQLSTATE.
var remedies = map[string]string{
	pgerrcode.ReadOnlySQLTransaction: "point --postgres-url at the primary, or reset default_transaction_read_only",
	pgerrcode.InsufficientPrivilege:  "GRANT this right to the role, or use another role: see docs/operations.md",
	pgerrcode.UndefinedTable:         "run posthaste migrate",
	pgerrcode.UndefinedColumn:        "run posthaste migrate",
	pgerrcode.UndefinedFunction:      "run posthaste migrate",
	pgerrcode.DiskFull:               "free space on the disk of Postgres",
	pgerrcode.LockNotAvailable:       "end the transaction that holds the lock: see pg_stat_activity",
	pgerrcode.QueryCanceled:          "find the statements that block or slow it in pg_stat_activity",
	pgerrcode.TooManyConnections:     "close connections, or raise max_connections or the role's CONNECTION LIMIT",
}

// unconnected explains a failure to connect. refused is the answer of the server, if there was one.
func unconnected(failed *pgconn.ConnectError, refused *pgconn.PgError) (problem, remedy string) {
	c := failed.Config
	at := net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port)))
	if strings.HasPrefix(c.Host, "/") {
		at = c.Host
	}
	// refusals has added the file of the password.
	database, file, fromFile := strings.Cut(c.Database, ", ")
	if refused != nil {
		problem = refused.Message + " at " + at
		switch refused.Code {
		case pgerrcode.InvalidPassword:
			problem = fmt.Sprintf("wrong password for user %q at %s", c.User, at)
			if c.Password == "" {
				problem = fmt.Sprintf("no password for user %q at %s", c.User, at)
			}
			if fromFile {
				return problem, file
			}
			return problem, setURL + " or POSTHASTE_POSTGRES_PASSWORD_FILE"
		case pgerrcode.InvalidAuthorizationSpecification:
			return problem, "give the role LOGIN and its address a line in pg_hba.conf, or " + setURL
		case pgerrcode.InvalidCatalogName:
			return problem, "create the database, or " + setURL
		case pgerrcode.InsufficientPrivilege:
			return problem, fmt.Sprintf("GRANT CONNECT ON DATABASE %s to the role, or %s", database, setURL)
		}
		if remedy = remedies[refused.Code]; remedy == "" {
			remedy = "see the log of Postgres, or " + setURL
		}
		return problem, remedy
	}
	failure := socket.Failure(failed)
	switch {
	case strings.Contains(failed.Error(), "refused TLS"):
		return "Postgres at " + at + " offers no TLS",
			"set ssl = on there, or another sslmode in POSTHASTE_POSTGRES_URL"
	case strings.Contains(failure, "certificate"):
		remedy = "correct sslrootcert, sslcert or the host in POSTHASTE_POSTGRES_URL"
	case failure == "":
		cause := errors.Unwrap(failed).Error()
		failure = "cannot be reached: " + strings.Join(strings.Fields(cause), " ")
		fallthrough
	default:
		remedy = "check that Postgres listens there, or " + setURL
	}
	return "Postgres at " + at + " " + failure, remedy
}
