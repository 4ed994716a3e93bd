package api

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// raw opens a connection and sends text.
func (w *world) raw(text string) net.Conn {
	w.tb.Helper()
	c, err := (&net.Dialer{}).DialContext(w.tb.Context(), "tcp", strings.TrimPrefix(w.url, "http://"))
	must(w.tb, err)
	w.tb.Cleanup(func() { _ = c.Close() })
	_, err = io.WriteString(c, text)
	must(w.tb, err)
	return c
}

func postHead(length string) string {
	return "POST /orders HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nIdempotency-Key: " + newKey() +
		"\r\n" + length + "\r\n\r\n"
}

func TestSlowClientsAreCutOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	t.Run("header", func(t *testing.T) {
		t.Parallel()
		start := time.Now()
		c := w.raw("POST /orders HTTP/1.1\r\nHost: x\r\n")
		_ = c.SetReadDeadline(start.Add(HeaderTimeout + 5*time.Second))
		// net/http answers 408 or just closes the connection.
		if _, err := io.ReadAll(c); err != nil {
			t.Errorf("still open after %v: %v", time.Since(start), err)
		}
		if took := time.Since(start); took < HeaderTimeout-time.Second {
			t.Errorf("cut off after %v", took)
		}
	})
	t.Run("body", func(t *testing.T) {
		t.Parallel()
		start := time.Now()
		c := w.raw(postHead("Content-Length: 90") + `{"amo`)
		_ = c.SetReadDeadline(start.Add(BodyTimeout + 10*time.Second))
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("after %v: %v", time.Since(start), err)
		}
		defer res.Body.Close()
		body, _ := io.ReadAll(res.Body)
		if res.StatusCode != 408 || !strings.Contains(string(body), "request_timeout") || !res.Close {
			t.Errorf("%d %s", res.StatusCode, body)
		}
		if took := time.Since(start); took < BodyTimeout-time.Second || took > BodyTimeout+7*time.Second {
			t.Errorf("after %v, want %v", took, BodyTimeout)
		}
	})
	t.Run("long header", func(t *testing.T) {
		t.Parallel()
		c := w.raw("POST /orders HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 2*MaxHeader) + "\r\n\r\n")
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		line, _ := bufio.NewReader(c).ReadString('\n')
		if !strings.Contains(line, "431") {
			t.Errorf("%q", line)
		}
	})
}

// A body of 10 MiB without a length is not read to its end.
func TestAnEndlessBodyIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.raw(postHead("Transfer-Encoding: chunked"))
	go func() {
		chunk := fmt.Sprintf("%x\r\n%s\r\n", 64<<10, strings.Repeat(" ", 64<<10))
		for range 160 {
			if _, err := io.WriteString(c, chunk); err != nil {
				return // disconnected, as it must be
			}
		}
	}()
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	must(t, err)
	defer res.Body.Close()
	testenv.Equal(t, "status", res.StatusCode, 413)
}
