// Package app is the program without most of its command line: the settings, and the processes that serve, relay and
// consume run.
//
// Settings are text, as the parser of the command line fills them in; Parse checks all of them and returns a Config, or
// every fault at once. A Config opens what a command needs: WithPool, Slots, ReaderClient. NewServe and NewRelay build
// a process that holds its listeners and connects when Run is called; Run ends with its context, after the drain
// timeout at the latest.
//
// cmd/posthaste calls it, and so do the engines behind commands (replay, bench, demo, gendocs), which run the processes
// as they are. It calls the drivers, the HTTP interfaces and cli; no package below may import it.
package app
