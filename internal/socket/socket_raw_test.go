//go:build linux && (amd64 || arm64)

package socket_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/socket"
)

// pair returns a connection of this package, and the other end.
func pair(t *testing.T, network string) (ours, theirs net.Conn) {
	t.Helper()
	addr := "127.0.0.1:0"
	if network == "unix" {
		addr = filepath.Join(t.TempDir(), "s")
	}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), network, addr)
	testenv.Must(t, err)
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
		}
		accepted <- c
	}()
	ours, err = socket.Quiet((&net.Dialer{}).DialContext)(t.Context(), network, l.Addr().String())
	testenv.Must(t, err)
	theirs = <-accepted
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	return ours, theirs
}

func onBoth(t *testing.T, test func(t *testing.T, ours, theirs net.Conn)) {
	t.Helper()
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			ours, theirs := pair(t, network)
			switch ours.(type) {
			case *net.TCPConn, *net.UnixConn:
				t.Fatalf("%T is Go's own connection", ours)
			}
			test(t, ours, theirs)
		})
	}
}

// More than a socket buffers, in both directions at once, arrives unchanged.
func TestMuchBothWays(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, ours, theirs net.Conn) {
		const size = 8 << 20
		send, back := make([]byte, size), make([]byte, size)
		for i := range send {
			send[i], back[i] = byte(i/7), byte(i/11)
		}
		var wg sync.WaitGroup
		write := func(c net.Conn, b []byte) {
			if n, err := c.Write(b); n != len(b) || err != nil {
				t.Errorf("wrote %d of %d: %v", n, len(b), err)
			}
		}
		read := func(c net.Conn, want []byte) {
			got := make([]byte, len(want))
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
				t.Errorf("read something else, or failed: %v", err)
			}
		}
		wg.Go(func() { write(ours, send) })
		wg.Go(func() { write(theirs, back) })
		wg.Go(func() { read(theirs, send) })
		wg.Go(func() { read(ours, back) })
		wg.Wait()
	})
}

func TestTheEnd(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, ours, theirs net.Conn) {
		if n, err := ours.Read(nil); n != 0 || err != nil {
			t.Errorf("reading nothing: %d, %v", n, err)
		}
		if n, err := ours.Write(nil); n != 0 || err != nil {
			t.Errorf("writing nothing: %d, %v", n, err)
		}
		theirs.Close()
		if n, err := ours.Read(make([]byte, 10)); n != 0 || err != io.EOF { //nolint:errorlint // callers compare it
			t.Errorf("behind the end: %d, %v", n, err)
		}
		var err error
		testenv.Eventually(t, 10*time.Second, func() error { // the first writes may still find room
			if _, err = ours.Write(make([]byte, 1000)); err == nil {
				return errors.New("what nobody can have is written")
			}
			return nil
		})
		var op *net.OpError
		if !errors.As(err, &op) || op.Op != "write" || op.Timeout() ||
			!errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("writing behind the end: %v", err)
		}
		ours.Close()
		_, err = ours.Read(make([]byte, 10))
		if !errors.As(err, &op) || op.Op != "read" || !errors.Is(err, net.ErrClosed) {
			t.Errorf("reading what is closed: %v", err)
		}
	})
}

func TestDeadlines(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, ours, theirs net.Conn) {
		late := func(what string, err error) {
			var timeout net.Error
			if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() {
				t.Errorf("%s past the deadline: %v", what, err)
			}
		}
		soon := func() time.Time { return time.Now().Add(20 * time.Millisecond) }
		_ = ours.SetDeadline(soon())
		_, err := ours.Read(make([]byte, 10))
		late("read", err)
		n, err := ours.Write(make([]byte, 32<<20)) // the other end does not read
		late("write", err)
		if n == 0 && err == nil || n == 32<<20 {
			t.Errorf("%d bytes fit where nobody reads", n)
		}
		// A deadline set during a wait ends it; one that is removed lets it continue.
		_ = ours.SetDeadline(time.Time{})
		done := make(chan error, 1)
		go func() { _, err := ours.Read(make([]byte, 10)); done <- err }()
		_ = ours.SetReadDeadline(time.Unix(1, 0))
		late("a read that waited", <-done)
		_ = ours.SetReadDeadline(time.Time{})
		go func() { _, err := ours.Read(make([]byte, 10)); done <- err }()
		go func() { _, _ = theirs.Write([]byte("x")) }()
		if err := <-done; err != nil {
			t.Errorf("after the deadline: %v", err)
		}
		go func() { _, err := ours.Read(make([]byte, 10)); done <- err }()
		ours.Close()
		if err := <-done; !errors.Is(err, net.ErrClosed) {
			t.Errorf("a read that was closed: %v", err)
		}
	})
}

// look makes the check of go-redis on a connection in its pool.
func look(t *testing.T, c net.Conn) (asked bool, n int, err error) {
	t.Helper()
	raw, rerr := c.(syscall.Conn).SyscallConn()
	if rerr != nil {
		t.Fatal(rerr)
	}
	rerr = raw.Read(func(fd uintptr) bool {
		asked = true
		n, _, err = syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		return true
	})
	return asked, n, errors.Join(err, rerr)
}

// seen waits until the pool's check finds so many bytes: 0 at the end.
func seen(t *testing.T, c net.Conn, want int) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, func() error {
		if asked, n, err := look(t, c); !asked || n != want || err != nil {
			return fmt.Errorf("asked %v, %d bytes, %w; want %d", asked, n, err, want)
		}
		return nil
	})
}

func TestAPoolSeesWhatHasEnded(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, ours, theirs net.Conn) {
		if asked, _, err := look(t, ours); asked || err != nil {
			t.Errorf("with nothing to read: asked %v, %v", asked, err)
		}
		if _, err := theirs.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		seen(t, ours, 1)
		if n, err := ours.Read(make([]byte, 10)); n != 1 || err != nil {
			t.Errorf("what was looked at is gone: %d, %v", n, err)
		}
		theirs.Close()
		seen(t, ours, 0)
		ours.Close()
		if _, _, err := look(t, ours); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a closed one: %v", err)
		}
	})
}

func TestWhatIsNoSocketStaysAsItIs(t *testing.T) {
	t.Parallel()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	refused := errors.New("refused")
	for _, c := range []struct {
		conn net.Conn
		err  error
	}{{a, nil}, {nil, refused}} {
		got, err := socket.Quiet(func(context.Context, string, string) (net.Conn, error) {
			return c.conn, c.err
		})(t.Context(), "tcp", "")
		if got != c.conn || !errors.Is(err, c.err) {
			t.Errorf("%v, %v; want %v, %v", got, err, c.conn, c.err)
		}
	}
}
