// Command posthaste moves events from a Postgres outbox table to Redis Streams. See posthaste --help.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"reflect"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
)

// Exit codes. They are part of the contract.
const (
	exitFailure  = 1
	exitBadUsage = 2
)

// commandLine is filled in by the parser.
type commandLine struct {
	app.Settings

	VersionFlag kong.VersionFlag `name:"version" help:"Print the version."`

	Migrate     migrateCmd     `cmd:"" group:"Run" help:"Apply the embedded migrations; safe to run from many places at once."`
	Serve       serveCmd       `cmd:"" group:"Run" settings:"Servers,Names,API,Admin listener,Process" help:"Run the API."`
	Relay       relayCmd       `cmd:"" group:"Run" settings:"Servers,Names,Relay,Admin listener,Process" help:"Run the relay."`
	Consume     consumeCmd     `cmd:"" group:"Run" help:"Print one JSON line per event, as a member of a consumer group."`
	Deliver     deliverCmd     `cmd:"" group:"Run" help:"POST each event to a URL as a signed webhook, as a member of a consumer group."`
	Healthcheck healthcheckCmd `cmd:"" group:"Run" settings:"API,Admin listener" help:"Ask a running process whether it is healthy; for containers."`
	Mode        modeCmd        `cmd:"" group:"Operate" help:"Show or set the desired mode: auto, cdc or poll."`
	Status      statusCmd      `cmd:"" group:"Operate" settings:"Servers,Names,Relay" help:"Show mode, leader, backlog, slot, parked events, and what was lost or restored."`
	Dead        deadCmd        `cmd:"" group:"Operate" help:"List, retry or drop parked events."`
	Replay      replayCmd      `cmd:"" group:"Operate" help:"Publish history again, marked as replayed; continues where the same command stopped."`
	Streams     streamsCmd     `cmd:"" group:"Operate" help:"Delete a stream on purpose."`
	Phantoms    phantomsCmd    `cmd:"" group:"Operate" help:"List events that are in streams and not in Postgres since a failover or a restore (the commit is lost, or the row was deleted), or acknowledge them."`
	Audit       auditCmd       `cmd:"" group:"Operate" help:"List changes and refused attempts, with the user of each."`
	Groups      groupsCmd      `cmd:"" group:"Operate" help:"List or drop consumer groups; an abandoned one keeps streams from being trimmed."`
	Trace       traceCmd       `cmd:"" group:"Operate" help:"Follow one id (order, event, or idempotency key) through Postgres, streams and consumer groups."`
	Doctor      doctorCmd      `cmd:"" group:"Operate" settings:"Servers,Names,Relay" help:"Check Postgres and Redis before the relay does; every finding names its remedy."`
	Adopt       adoptCmd       `cmd:"" group:"Operate" help:"Take over streams last written by another database."`
	Bridge      bridgeCmd      `cmd:"" group:"Operate" help:"Use an existing outbox table as it is: a trigger copies its rows into the outbox."`
	Shadow      shadowCmd      `cmd:"" group:"Try and measure" help:"Compare an outbox that another relay publishes with its streams."`
	Credits     creditsCmd     `cmd:"" group:"Operate" help:"Inspect and repair the ledger of credits."`
	Keygen      keygenCmd      `cmd:"" group:"Operate" settings:"none" help:"Make an API key and its line for the file of keys: the line goes to standard output, the key to standard error."`
	Uninstall   uninstallCmd   `cmd:"" group:"Operate" help:"Drop the slot, the publication and all bridges; an abandoned slot fills a disk."`
	Dev         devCmd         `cmd:"" group:"Try and measure" settings:"Servers,Names,Relay,Admin listener,Process" help:"Migrate, relay and print events in one process, with your servers; for development."`
	Demo        demoCmd        `cmd:"" group:"Try and measure" settings:"Process" help:"Run everything on its own servers and show events arriving."`
	Bench       benchCmd       `cmd:"" group:"Try and measure" settings:"Servers" help:"Measure throughput and latency, and compare them with limits measured in the same run."`
	Prove       proveCmd       `cmd:"" group:"Try and measure" settings:"Process" help:"Inject faults into the whole product, on its own servers, and verify that every promise is kept."`
	Shown       settingsCmd    `cmd:"" name:"settings" group:"About" settings:"Servers,Names,Relay,API,Admin listener,Process" help:"Print the effective settings, and where each comes from."`
	Completion  completionCmd  `cmd:"" group:"About" settings:"none" help:"Print what completes commands and flags in a shell."`
	Version     versionCmd     `cmd:"" group:"About" settings:"none" help:"Print the version."`
	HelpOn      helpCmd        `cmd:"" group:"About" settings:"none" name:"help" help:"Print the help of a command."`
	GenDocs     genDocsCmd     `cmd:"" hidden:"" help:"Write the reference of the settings."`

	ProveConsumer proveConsumerCmd `cmd:"" hidden:"" help:"Consume for a campaign of posthaste prove."`
}

// quiet discards the log of the Redis client. The client also returns each of these errors, and the commands report
// them.
type quiet struct{}

// Printf implements the client's logger.
func (quiet) Printf(context.Context, string, ...any) {}

func main() {
	redis.SetLogger(quiet{})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-ctx.Done()
		stop() // a second signal ends the process at once
	}()
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program, with arguments and streams as parameters.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	var line commandLine
	exited := -1
	parser, err := kong.New(&line, kong.Name("posthaste"), app.Variables(), kong.Vars{"version": versionLine()},
		kong.Description("A transactional outbox: Postgres to Redis Streams, by the write-ahead log or by sweeping."),
		kong.Writers(stdout, stderr), kong.Exit(func(code int) { exited = code }),
		kong.TypeMapper(reflect.TypeFor[time.Duration](), kong.MapperFunc(parseDuration)),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true}), kong.Help(help),
		kong.ValueFormatter(meaning))
	if err != nil {
		fmt.Fprintln(stderr, "posthaste:", err)
		return exitFailure
	}
	kctx, err := parser.Parse(helpArgs(args))
	if exited >= 0 {
		return exited // --help or --version
	}
	if err != nil {
		fmt.Fprintf(stderr, "posthaste: %v (see posthaste --help)\n", err)
		return exitBadUsage
	}
	line.Given = flagsOf(kctx)
	settings := line.Settings
	if kctx.Command() == "healthcheck" {
		settings = settings.OfAdminListener()
	}
	config, err := settings.Parse()
	if err != nil {
		for _, fault := range faults(err) {
			fmt.Fprintln(stderr, "posthaste:", fault)
		}
		return exitBadUsage
	}
	config.Version = version
	line.WarnOfSecrets(config.Logger())
	line.WarnOfUnknown(parser.Model, config.Logger())
	e := &env{
		IO:     cli.IO{Stdin: stdin, Stdout: stdout, Stderr: stderr},
		config: config, settings: line.Settings, model: parser.Model,
	}
	kctx.BindTo(ctx, (*context.Context)(nil))
	err = kctx.Run(e)
	if err == nil {
		return 0
	}
	if !errors.Is(err, cli.ErrSaid) {
		text := ops.Printable(err.Error()) + cli.Remedy(err)
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			text = "interrupted"
		}
		fmt.Fprintln(stderr, "posthaste:", text)
	}
	var usage *cli.UsageError
	var exit *cli.ExitError
	switch {
	case errors.As(err, &exit):
		return exit.Code
	case errors.As(err, &usage):
		return exitBadUsage
	}
	return exitFailure
}

// flagsOf returns the names of the flags that were given on the command line.
func flagsOf(kctx *kong.Context) (names []string) {
	for _, p := range kctx.Path {
		if p.Flag != nil && !p.Resolved {
			names = append(names, p.Flag.Name)
		}
	}
	return names
}

// faults returns the errors that a joined error consists of.
func faults(err error) []error {
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		return j.Unwrap()
	}
	return []error{err}
}
