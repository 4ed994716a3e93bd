package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// program is one of the two compared versions.
type program struct {
	// Version is the commit, and "-dirty" if the working tree has changes.
	Version string `json:"version"`
	path    string
}

type pair struct{ base, tree program }

// build builds the commit and the working tree of the repository root into dir, in the same way.
func build(ctx context.Context, root, dir, commit string, stderr io.Writer) (pair, error) {
	var p pair
	// Refuse objects that are not commits, and names that look like options.
	hash, err := output(ctx, root, "git", "rev-parse", "--verify", "--quiet", "--end-of-options", commit+"^{commit}")
	if ctx.Err() != nil {
		return p, ctx.Err()
	}
	if err != nil {
		return p, fmt.Errorf("there is no commit %q in this repository: see git log, or git fetch the branch that "+
			"has it", commit)
	}
	p.base = program{path: filepath.Join(dir, "base")}
	if p.base.Version, err = output(ctx, root, "git", "describe", "--tags", "--always", hash); err != nil {
		return p, err
	}
	p.tree = program{path: filepath.Join(dir, "new")}
	if p.tree.Version, err = output(ctx, root, "git", "describe", "--tags", "--always", "--dirty"); err != nil {
		return p, err
	}
	// An archive rather than a worktree: it leaves nothing in the repository.
	source := filepath.Join(dir, "source")
	if err := os.Mkdir(source, 0o700); err != nil {
		return p, err
	}
	tar := filepath.Join(dir, "source.tar")
	if _, err := output(ctx, root, "git", "archive", "--output="+tar, hash); err != nil {
		return p, err
	}
	if _, err := output(ctx, root, "tar", "-x", "-f", tar, "-C", source); err != nil {
		return p, err
	}
	for _, b := range []struct {
		program
		source, what string
	}{{p.base, source, "commit " + commit}, {p.tree, root, "the working tree"}} {
		fmt.Fprintf(stderr, "building %s (%s)\n", b.what, b.Version)
		// The same flags as in the Makefile.
		_, err := output(ctx, b.source, "env", "CGO_ENABLED=0", "go", "build", "-trimpath", "-buildvcs=false",
			"-ldflags=-s -w -X main.version="+b.Version, "-o", b.path, "./cmd/posthaste")
		if err != nil {
			return p, fmt.Errorf("%s does not build; fix that, or choose another BASE: %w", b.what, err)
		}
	}
	return p, nil
}

// output runs a program in a folder and returns its output without the trailing newline.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	gently(cmd)
	var out, errOut strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(append([]string{name}, args...), " "), err,
			strings.TrimSpace(errOut.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// gently makes cancellation send a single interrupt, as Ctrl-C does: a benchmark then removes what it has made. The
// command has a process group of its own, because the terminal's Ctrl-C would be a second interrupt, which ends it at
// once.
func gently(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
}
