package link_test

import (
	"bufio"
	"fmt"
	"net"
	"testing"
	"time"

	"posthaste/internal/lab/link"
)

// echo is a server that repeats each line, prefixed with its name.
func echo(t *testing.T, name string) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for lines := bufio.NewScanner(c); lines.Scan(); {
					_, _ = fmt.Fprintf(c, "%s %s\n", name, lines.Text())
				}
			}()
		}
	}()
	return l.Addr().String()
}

// client is connected through a link.
type client struct {
	t *testing.T
	net.Conn
	r *bufio.Reader
}

func dial(t *testing.T, l *link.Link) *client {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &client{t, c, bufio.NewReader(c)}
}

func (c *client) say(text string) { _, _ = fmt.Fprintln(c.Conn, text) }

// hears waits for the line; "" means the end of the connection.
func (c *client) hears(want string) {
	c.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	line, err := c.r.ReadString('\n')
	if want == "" && err == nil || want != "" && line != want+"\n" {
		c.t.Fatalf("heard %q, %v; want %q", line, err, want)
	}
}

// silent checks that nothing arrives in the time that a line would take.
func (c *client) silent() {
	c.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if line, err := c.r.ReadString('\n'); err == nil {
		c.t.Fatalf("heard %q", line)
	}
}

func TestLink(t *testing.T) {
	t.Parallel()
	l, err := link.New(t.Context(), echo(t, "first"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	c := dial(t, l)
	c.say("a")
	c.hears("first a")

	l.Set(link.Trouble{Stall: true})
	c.say("b")
	c.silent()
	l.Set(link.Trouble{})
	c.hears("first b")

	l.Set(link.Trouble{Delay: 20 * time.Millisecond, BytesPerSecond: 1000})
	began := time.Now()
	c.say("c")
	c.hears("first c")
	if took := time.Since(began); took < 40*time.Millisecond {
		t.Errorf("slow: %v", took)
	}

	l.Set(link.Trouble{LoseReplies: true})
	c.say("d")
	c.silent()
	l.Set(link.Trouble{})
	c.hears("")

	c = dial(t, l)
	l.Set(link.Trouble{Refuse: true})
	c.hears("")
	dial(t, l).hears("")

	l.Set(link.Trouble{})
	c = dial(t, l)
	c.say("e")
	c.hears("first e")
	l.To(echo(t, "second"))
	c.hears("")
	c = dial(t, l)
	c.say("f")
	c.hears("second f")
}

// A copy of the closed socket does not keep a link from coming up, once the copy is closed as well.
func TestUpWaitsForThePort(t *testing.T) {
	t.Parallel()
	l, err := link.New(t.Context(), echo(t, "a"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.Down()
	other, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(50*time.Millisecond, func() { _ = other.Close() })
	l.Up()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}
