package app

import (
	"context"
	"net"
	"os"
	"strconv"
	"time"

	"posthaste/internal/pause"
)

// notify reports the state of the process to systemd until ctx ends, if systemd waits for that (Type=notify). reasons
// returns why the process is not ready; empty if it is. The watchdog is fed whether it is ready or not: a restart does
// not help against a server that is down.
func (p *process) notify(ctx context.Context, reasons func(ctx context.Context) []string) {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unixgram", socket)
	if err != nil {
		p.log.Warn("cannot notify systemd", "error", err)
		return
	}
	defer func() { _ = conn.Close() }()
	every := time.Second
	if n, err := strconv.Atoi(os.Getenv("WATCHDOG_USEC")); err == nil {
		every = min(every, time.Duration(n)*time.Microsecond/2)
	}
	for ready := false; ctx.Err() == nil; _ = pause.For(ctx, every) {
		state := "WATCHDOG=1"
		if !ready {
			if why := reasons(ctx); len(why) > 0 {
				state += "\nSTATUS=not ready: " + why[0]
			} else {
				ready, state = true, "READY=1\nSTATUS="
			}
		}
		_, _ = conn.Write([]byte(state)) // systemd acts if nothing arrives
	}
	_, _ = conn.Write([]byte("STOPPING=1"))
}
