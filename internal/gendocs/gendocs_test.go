package gendocs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"posthaste/internal/lab/testenv/commandline"
)

// model is a small program.
func model(t *testing.T) *kong.Application {
	t.Helper()
	var line struct {
		Size string `group:"First" help:"How large | small." env:"POSTHASTE_SIZE" default:"1MiB"`
		Addr string `group:"First" help:"Where." env:"POSTHASTE_ADDR" placeholder:"here:1"`
		None string `group:"Second" help:"Nothing." env:"POSTHASTE_NONE"`
		Flag string `help:"It has no variable."`
		One  struct {
			Yes  bool   `help:"Do not ask."`
			Name string `required:"" help:"Name."`
			ID   string `arg:"" optional:""`
		} `cmd:"" help:"Does one."`
		Many struct {
			List struct{} `cmd:"" help:"Lists."`
			Drop struct{} `cmd:"" help:"Drops."`
		} `cmd:"" help:"Has commands of its own."`
		Secret struct{} `cmd:"" hidden:"" help:"Hidden."`
	}
	parser, err := kong.New(&line, kong.Name("posthaste"))
	if err != nil {
		t.Fatal(err)
	}
	return parser.Model
}

func TestReference(t *testing.T) {
	t.Parallel()
	got := reference(model(t))
	for _, want := range []string{
		"| `POSTHASTE_SIZE` | `--size` | `1MiB` | How large \\| small. |\n",
		"| `POSTHASTE_ADDR` | `--addr` | `here:1` | Where. |\n",
		"| `POSTHASTE_NONE` | `--none` | – | Nothing. |\n",
		"| `posthaste one [--yes] --name=NAME [ID]` | Does one. |\n",
		"| `posthaste many list` | Lists. |\n| `posthaste many drop` | Drops. |\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	for _, unwanted := range []string{"--flag", "Hidden", "posthaste many`"} {
		if strings.Contains(got, unwanted) {
			t.Errorf("%q is in\n%s", unwanted, got)
		}
	}
}

// A page is up to date after it was written, and is not after a manual change.
func TestCheckComparesWhatIsWritten(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	run := func(check bool) error {
		return Options{Dir: dir, Check: check}.Run(t.Context(), commandline.Config(t), model(t))
	}
	if err := run(true); !os.IsNotExist(unwrapped(err)) {
		t.Errorf("an empty folder: %v", err)
	}
	if err := run(false); err != nil {
		t.Fatal(err)
	}
	if err := run(true); err != nil {
		t.Errorf("just written: %v", err)
	}
	file := filepath.Join(dir, "metrics.md")
	if err := os.WriteFile(file, []byte("changed"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(true); err == nil || err.Error() != file+" is out of date: run make docs" {
		t.Errorf("changed by hand: %v", err)
	}
}

// unwrapped returns the first of joined errors.
func unwrapped(err error) error {
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		return j.Unwrap()[0]
	}
	return err
}
