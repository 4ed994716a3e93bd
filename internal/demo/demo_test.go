package demo_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/demo"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/lab/testenv/commandline"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// options make the shortest demo.
func options() demo.Options {
	return demo.Options{
		Rate: 20, Duration: 6 * time.Second, PGBin: os.Getenv("POSTHASTE_TEST_PG_BIN"),
		RedisBin: os.Getenv("POSTHASTE_TEST_REDIS_BIN"),
	}
}

// The demo runs to its end, and every order arrives once at the consumer.
func TestDemoTellsItsStory(t *testing.T) {
	t.Parallel()
	t.Run("one Redis", func(t *testing.T) { t.Parallel(); tellsItsStory(t, false, `port \d+`) })
	t.Run("a cluster", func(t *testing.T) {
		t.Parallel()
		tellsItsStory(t, true, `ports (\d+, ){2}\d+ \(replicas: (\d+, ){2}\d+\)`)
	})
}

func tellsItsStory(t *testing.T, cluster bool, at string) {
	t.Helper()
	var out, errOut bytes.Buffer
	o := options()
	o.Once, o.Cluster = true, cluster
	if err := o.Run(t.Context(), commandline.Config(t), cli.IO{Stdout: &out, Stderr: &errOut}); err != nil {
		t.Fatalf("%v\n%s%s", err, out.String(), errOut.String())
	}
	for _, want := range []string{
		`(?m)^Postgres on port \d+ and Redis on ` + at + `, started in \S+\n` +
			`  postgres://postgres:\w+@127\.0\.0\.1:\d+/`,
		`(?m)^API on http://127\.0\.0\.1:\d+, relay and its metrics on http://127\.0\.0\.1:\d+\nConsole: http://`,
		`(?m)^Orders, one by one:\n(  order \S+: its event was with the consumer \S+ ms after the POST was sent\n){5}` +
			`  order \S+: posted twice with one key, placed once\n`,
		`(?m)^Under load, 20 orders/s for 6s, switching to poll and back:\n`,
		`(?m)^  cdc   p50 `, `(?m)^  poll  p50 `,
		`(?m)^(\d+) orders placed, (\d+) events in the stream: lost 0, duplicates 0\n`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("it does not say %s", want)
		}
	}
	if t.Failed() {
		t.Log(out.String(), errOut.String())
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, spoil := range []func(o *demo.Options){
		func(o *demo.Options) { o.Rate = 0 }, func(o *demo.Options) { o.Rate = 5001 },
		func(o *demo.Options) { o.Duration = time.Second },
	} {
		o := options()
		spoil(&o)
		var usage *cli.UsageError
		if err := o.Run(t.Context(), app.Config{}, cli.IO{}); !errors.As(err, &usage) {
			t.Errorf("%+v: %v is no usage error", o, err)
		}
	}
}

// A demo that stays starts Redis again after a kill.
func TestDemoStartsRedisAgain(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- options().Run(ctx, commandline.Config(t), cli.IO{Stdout: w, Stderr: io.Discard})
		w.Close()
	}()
	killed := false
	for lines := bufio.NewScanner(r); lines.Scan(); {
		switch line := lines.Text(); {
		case strings.HasPrefix(line, "  kill -9 "):
			pid, err := strconv.Atoi(strings.Fields(line)[2])
			testenv.Must(t, err)
			testenv.Must(t, syscall.Kill(pid, syscall.SIGKILL))
			killed = true
		case strings.HasPrefix(line, "Redis runs again"):
			cancel()
		}
	}
	if err := <-done; !killed || ctx.Err() == nil || err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("killed %v; the demo ended with %v", killed, err)
	}
}

// Ctrl-C at any time ends the demo, which removes everything.
func TestDemoIsInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out bytes.Buffer
	err := options().Run(ctx, commandline.Config(t), cli.IO{Stdout: &out, Stderr: &out})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("it ends with %v: %s", err, out.String())
	}
}
