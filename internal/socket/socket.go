package socket

import (
	"context"
	"net"
)

// Dial is how a client makes its connections.
type Dial func(ctx context.Context, network, addr string) (net.Conn, error)

// Quiet returns a Dial whose connections are those of dial, with the reads and writes of this package. What is not a
// socket of Go's own, TLS for example, stays as it is; TLS above such a connection is fine.
func Quiet(dial Dial) Dial {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return quiet(c), nil
	}
}
