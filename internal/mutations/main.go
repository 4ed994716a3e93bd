// Command mutations shows that tests detect missing safeguards: it removes the safeguards of the guarantees from a
// copy of this tree, one at a time, and runs the test that must then fail. It prints a table, and fails if a test
// passes, or if a mutation does not match the code. make mutations runs it; an argument is a regular expression that
// selects safeguards.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutations:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	chosen, err := regexp.Compile(strings.Join(args, " "))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "posthaste-mutations-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := copyTree(ctx, dir); err != nil {
		return err
	}
	survived, played := 0, 0
	fmt.Fprintln(out, "| safeguard | mutation | what went red | after |\n|---|---|---|---|")
	for _, m := range mutations {
		if !chosen.MatchString(m.safeguard) {
			continue
		}
		played++
		began := time.Now()
		red, err := m.play(ctx, dir)
		if err != nil {
			return fmt.Errorf("%s: %w", m.safeguard, err)
		}
		what := strings.Join(red, ", ")
		if len(red) == 0 {
			survived++
			what = "**nothing** (" + m.test + ")"
		}
		fmt.Fprintf(out, "| %s | %s: %s | %s | %.0f s |\n", m.safeguard, m.file, m.about, what,
			time.Since(began).Seconds())
	}
	if survived > 0 || played == 0 {
		return fmt.Errorf("%d of %d mutations survived", survived, played)
	}
	return nil
}

// copyTree copies the files of the repository as they are now.
func copyTree(ctx context.Context, dir string) error {
	list := exec.CommandContext(ctx, "git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
	names, err := list.Output()
	if err != nil {
		return fmt.Errorf("list the files of the repository: %w", err)
	}
	for name := range strings.SplitSeq(strings.Trim(string(names), "\x00"), "\x00") {
		text, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, and not committed
		}
		if err != nil {
			return err
		}
		to := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		info, err := os.Stat(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(to, text, info.Mode().Perm()); err != nil {
			return err
		}
	}
	return os.Chmod(dir, 0o755)
}

// apply returns the mutated text of the mutation's file.
func (m mutation) apply(text string) (string, error) {
	if n := strings.Count(text, m.old); n != 1 {
		return "", fmt.Errorf("%s has the text of the mutation %d times, want once: %q", m.file, n, m.old)
	}
	return strings.Replace(text, m.old, m.replacement, 1), nil
}

// failed matches the names of failed tests.
var failed = regexp.MustCompile(`(?m)^--- FAIL: (\S+)`)

// play mutates the copy, runs the test, and restores the copy. It returns the failed tests.
func (m mutation) play(ctx context.Context, dir string) (red []string, err error) {
	path := filepath.Join(dir, m.file)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	mutant, err := m.apply(string(text))
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(path, []byte(mutant), 0o600); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.WriteFile(path, text, 0o600)) }()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-timeout=9m", "-run", "^("+m.test+")", m.pkg)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil && strings.Contains(string(out), "no tests to run"):
		return nil, fmt.Errorf("%s has no test %s", m.pkg, m.test)
	case err == nil:
		return nil, nil
	case !errors.As(err, &exit) || ctx.Err() != nil:
		return nil, fmt.Errorf("go test: %w", err)
	}
	for _, name := range failed.FindAllStringSubmatch(string(out), -1) {
		red = append(red, name[1])
	}
	if len(red) == 0 { // it may not compile
		return nil, fmt.Errorf("no test failed, but: %s", out)
	}
	return red, nil
}
