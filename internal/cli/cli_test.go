package cli_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/internal/cli"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
	"posthaste/outbox"
)

func TestShortCountsCharacters(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{"éééé": "éééé", "éé123": "éé1…", "a\nbcd": "a b…", "": ""} {
		if got := cli.Short(text, 4); got != want {
			t.Errorf("%q in four characters is %q, want %q", text, got, want)
		}
	}
}

func TestDurationsMayHaveDaysAndWeeks(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"500ms": 500 * time.Millisecond, "3d": 72 * time.Hour, "1w2d": 216 * time.Hour, "1.5d": 36 * time.Hour,
		"2d12h": 60 * time.Hour, "-1d": -24 * time.Hour, "0": 0,
	} {
		if got, err := cli.ParseDuration(text); err != nil || got != want {
			t.Errorf("%q: %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "d", "3", "3y", "1.2.3d", "3 d", "9999999999w"} {
		if got, err := cli.ParseDuration(text); err == nil {
			t.Errorf("%q is %v, want an error", text, got)
		}
	}
}

func TestRoughHasTwoUnits(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "-", -time.Hour: "-", 1234 * time.Microsecond: "1ms", 1234 * time.Millisecond: "1.2s",
		61 * time.Second:                "1m01s",
		90*time.Minute + 59*time.Second: "1h30m", 49*time.Hour + time.Minute: "2d01h",
	} {
		if got := ops.Rough(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}

func TestRemedies(t *testing.T) {
	t.Parallel()
	refused := func(code string) error {
		return fmt.Errorf("write: %w", &pgconn.PgError{Code: code, Message: "refused"})
	}
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"unknown":   {errors.New("first\n\tsecond"), "first second"},
		"standby":   {refused(pgerrcode.ReadOnlySQLTransaction), "write: refused: point --postgres-url at the primary"},
		"recovery":  {errors.New("recovery is in progress"), "progress: point --postgres-url"},
		"disk":      {refused(pgerrcode.DiskFull), "write: refused: free space on the disk of Postgres"},
		"its own":   {&outbox.SlotError{Reason: "no_right", Err: refused(pgerrcode.InsufficientPrivilege)}, "refused"},
		"timeout":   {fmt.Errorf("audit: %w", context.DeadlineExceeded), "audit: did not end in time: posthaste"},
		"redis":     {cli.WithRedisRemedy(context.DeadlineExceeded), "Redis at h:1 does not answer in time"},
		"interrupt": {cli.WithRedisRemedy(context.Canceled), context.Canceled.Error()},
	} {
		if got := cli.Line(c.err, "h:1"); !strings.Contains(got, c.want) || strings.Contains(got, "SQLSTATE") {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	if cli.WithRedisRemedy(nil) != nil {
		t.Error("no error of Redis becomes one")
	}
	var usage *cli.UsageError
	if err := fmt.Errorf("open: %w", cli.Usage("--x must be positive")); !errors.As(err, &usage) ||
		err.Error() != "open: --x must be positive" {
		t.Errorf("not a usage error: %v", err)
	}
}

func TestJSONIsIndentedAndEscapesNoHTML(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := (cli.IO{Stdout: &out}).JSON(map[string]string{"a": "<&>"}); err != nil ||
		out.String() != "{\n  \"a\": \"<&>\"\n}\n" {
		t.Errorf("%v: %q", err, out.String())
	}
}

func TestConfirm(t *testing.T) {
	t.Parallel()
	for answer, agreed := range map[string]bool{
		"y\n": true, " YES \n": true, "n\n": false, "\n": false,
		"yep\n": false,
	} {
		person, tty := testenv.Terminal(t, 80)
		var asked bytes.Buffer
		if _, err := person.WriteString(answer); err != nil {
			t.Fatal(err)
		}
		err := cli.IO{Stdin: tty, Stderr: &asked}.Confirm(t.Context(), false, "Drop \x1b[2J?")
		if (err == nil) != agreed || asked.String() != "Drop ?[2J? [y/N] " {
			t.Errorf("%q: %v, asked %q", answer, err, asked.String())
		}
	}
	if err := (cli.IO{}).Confirm(t.Context(), true, ""); err != nil {
		t.Errorf("with --yes: %v", err)
	}
	if err := (cli.IO{Stdin: strings.NewReader("y\n")}).Confirm(t.Context(), false, "?"); err == nil ||
		!strings.Contains(err.Error(), "--yes") {
		t.Errorf("without a terminal: %v", err)
	}
}

func TestTallyInALog(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := cli.NewTally(&out, 1000, 100)
	p.At(200) // too early for a line
	p.Say("waiting for %d", 1)
	p.End()
	if out.String() != "waiting for 1\n" || p.Done() != "200 of 1,000 events" {
		t.Errorf("wrote %q, %s", out.String(), p.Done())
	}
	if got := cli.NewTally(&out, -1, 1234).Done(); got != "1,234 events" {
		t.Errorf("without a total: %s", got)
	}
}

func TestColoursAreForTerminals(t *testing.T) {
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "xterm")
	_, tty := testenv.Terminal(t, 80)
	if !cli.IsTerminal(tty) || !cli.Colours(tty) || cli.IsTerminal(&bytes.Buffer{}) || cli.Colours(&bytes.Buffer{}) ||
		cli.IsTerminal((*os.File)(nil)) {
		t.Error("what is a terminal is not known")
	}
	t.Setenv("NO_COLOR", "1")
	if cli.Colours(tty) {
		t.Error("NO_COLOR is ignored")
	}
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "dumb")
	if cli.Colours(tty) {
		t.Error("a dumb terminal is given colours")
	}
}
