package ops

import (
	"context"
	"net"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// redisTransport warns about a Redis beyond this machine without TLS, and about a certificate that is not verified.
func (d *doctor) redisTransport(which, flag string, o *redis.UniversalOptions) {
	switch {
	case o == nil:
	case o.TLSConfig != nil && o.TLSConfig.InsecureSkipVerify:
		d.warn(which+" TLS", "--redis-skip-verify=off, and --redis-ca for the CA of its certificate",
			"its certificate is not verified: an attacker on the network can read and change everything")
	case o.TLSConfig == nil && slices.ContainsFunc(o.Addrs, beyond):
		d.warn(which+" TLS", "rediss:// in --"+flag+", or a tunnel",
			"the connection to %s is not encrypted: the password and every event can be read on the way",
			strings.Join(o.Addrs, ", "))
	}
}

// beyond reports whether an address, host:port or the path of a socket, is on another machine.
func beyond(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		host = addr
	}
	if strings.HasPrefix(host, "/") || strings.HasPrefix(host, "@") || host == "localhost" ||
		strings.HasSuffix(host, ".localhost") {
		return false
	}
	ip := net.ParseIP(host)
	return ip == nil || !ip.IsLoopback()
}

// transport checks a connection to Postgres that leaves this machine.
func (d *doctor) transport(ctx context.Context, conn *pgx.Conn) {
	if peer := conn.PgConn().Conn().RemoteAddr(); peer.Network() != "unix" && beyond(peer.String()) {
		d.encryption(ctx, conn)
	}
}

// encryption warns about a connection to Postgres that others can read or intercept. The server reports whether it is
// encrypted; only the client knows whether it verified the certificate.
func (d *doctor) encryption(ctx context.Context, conn *pgx.Conn) {
	host := conn.Config().Host
	const remedy = "sslmode=verify-full and sslrootcert in --postgres-url (docs/operations.md, TLS)"
	var encrypted bool
	err := conn.QueryRow(ctx, query("doctor_tls")).Scan(&encrypted)
	config := conn.Config().TLSConfig
	switch {
	case err != nil:
		d.warn("postgres TLS", remedy, "cannot check whether the connection is encrypted: %v", OneLine(err))
	case !encrypted:
		d.warn("postgres TLS", remedy,
			"the connection to %s is not encrypted: every event, and perhaps the password, can be read on the way",
			host)
	case config == nil || config.InsecureSkipVerify && config.VerifyPeerCertificate == nil:
		d.warn("postgres TLS", remedy,
			"the connection to %s is encrypted and its certificate is not verified: an attacker on the network can "+
				"read and change everything", host)
	case config.InsecureSkipVerify:
		d.warn("postgres TLS", remedy,
			"the certificate of %s is verified, but not that it is for this host (sslmode=verify-ca)", host)
	default:
		d.ok("postgres TLS", "encrypted and verified")
	}
}
