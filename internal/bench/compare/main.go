// Command compare measures two versions of posthaste against each other: a commit, and the working tree. It builds
// both, runs the same `posthaste bench` with each in turns, and prints for every figure the ratio of the two, with its
// spread; where there is no difference, it says so.
//
//	compare --base=COMMIT [--rounds=N] [--json] [drain|latency|idle|orders [flags]]
//
// `make bench-compare` calls it. It exits with 0 whatever the figures are, and otherwise only if something could not be
// run. What it makes is in one temporary folder, which is removed, also after Ctrl-C.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"posthaste/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], cli.IO{Stdout: os.Stdout, Stderr: os.Stderr})
	interrupted := ctx.Err() != nil
	stop()
	switch {
	case err == nil:
		return
	case interrupted:
		err = errors.New("interrupted; everything it created was removed")
	}
	fmt.Fprintln(os.Stderr, "bench-compare:", err)
	os.Exit(1)
}

// leastRounds is how many it takes to tell a difference from chance.
const leastRounds = 3

// run is the whole program but for the process around it.
func run(ctx context.Context, args []string, o cli.IO) (err error) {
	flags := flag.NewFlagSet("bench-compare", flag.ContinueOnError)
	flags.SetOutput(o.Stderr)
	base := flags.String("base", "", "the `commit` to compare the working tree with")
	rounds := flags.Int("rounds", 5, "how often each is measured; at least 3")
	asJSON := flags.Bool("json", false, "print JSON instead of tables")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	switch {
	case *base == "":
		return errors.New("name the commit to compare the working tree with: make bench-compare BASE=<commit>")
	case *rounds < leastRounds:
		return fmt.Errorf("ROUNDS must be at least %d: fewer do not tell a difference from chance", leastRounds)
	}
	bench := flags.Args()
	if len(bench) == 0 {
		bench = []string{"drain"}
	}
	dir, err := os.MkdirTemp("", "posthaste-compare-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	both, err := build(ctx, ".", dir, *base, o.Stderr)
	if err != nil {
		return err
	}
	m, err := measure(ctx, both, bench, *rounds, o.Stderr)
	if err != nil {
		return err
	}
	m.compare()
	if *asJSON {
		return o.JSON(m)
	}
	return m.print(o.Stdout)
}
