package socket

import (
	"context"
	"net"
)

// Dial connects to an address.
type Dial func(ctx context.Context, network, addr string) (net.Conn, error)

// Quiet returns a Dial whose connections are those of dial, with the reads and writes of this package. Connections
// that are not sockets of Go's own, such as TLS, are returned unchanged; TLS on top of such a connection works.
func Quiet(dial Dial) Dial {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return quiet(c), nil
	}
}
